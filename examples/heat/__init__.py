"""Parts of heat2d.py that have little to do with meshes."""
