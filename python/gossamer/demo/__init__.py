"""`gossamer demo`: one GPT trained four ways on real text. Start reading at train.py."""
