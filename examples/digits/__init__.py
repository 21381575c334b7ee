"""Parts of train_digits.py beside the training itself: data, options, reports."""
