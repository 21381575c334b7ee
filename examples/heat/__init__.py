"""What of heat2d.py has little to do with meshes."""
