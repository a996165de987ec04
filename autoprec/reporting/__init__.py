"""Results and events as text for people. Nothing is decided here."""
