"""`gossamer bench network`: our trainings and torch's over slow links, compared in one run.

command.py has the flags and prints; worker.py is one rank; variants.py lists what is compared and tasks.py what is
trained; steps.py times steps, loss.py trains to a loss; lines.py turns figures into results.
"""
