"""The model and the text that `gossamer demo`, `gossamer bench`, `gossamer plan` and the lab train."""
