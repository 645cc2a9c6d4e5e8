"""Small programs that reproduce a framework's faults on one idle GPU, and what their answers mean.

`programs/` travels and runs beside torch, as a run of its own; verdicts, expectations and tables are pure;
`running` acts.
"""
