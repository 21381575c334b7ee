"""Parts of train_gpt.py beside the training itself: text, options, reports, samples."""
