"""`gossamer bench network`: trainings over slow links, ours and torch's in the same run. Start at command.py."""
