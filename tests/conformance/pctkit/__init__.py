"""The conformance table of `pct`: rows, and the places where they are run (docs/pct.md)."""
