"""Parts that several examples share: command line, console, saving, ending."""
