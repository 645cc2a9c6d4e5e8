"""Drafters as others read them: z-lab's layout (`hf`: z-lab's code, SGLang, vLLM) and that of `speculators`.

`names` says which tensors a drafter has, `files` reads and writes folders, `hf` and `speculators` translate
config.json, `commands` puts them together for `python -m trainer export` and `import`.
"""
