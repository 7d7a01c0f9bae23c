"""`gossamer doctor`: checks a machine, or all workers of a job, before a run is blamed. Start at cli.py."""
