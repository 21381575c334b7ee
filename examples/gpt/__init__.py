"""What train_gpt.py needs beside the training itself: text, options, reports, samples."""
