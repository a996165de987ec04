"""One file a vendor or subject; each turns what the machine says into an observation or a note."""
