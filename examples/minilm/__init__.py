"""all-MiniLM-L6-v2, and models built alike, on a mesh: sentences to vectors."""
