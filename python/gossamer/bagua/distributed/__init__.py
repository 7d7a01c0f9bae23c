"""Bagua's launchers, for ``python -m``; see launch/bagua.py."""
