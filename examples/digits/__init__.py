"""What train_digits.py needs beside the training itself: data, options, reports."""
