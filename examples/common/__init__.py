"""What several examples share and none of them is about: command line, console, saving, ending."""
