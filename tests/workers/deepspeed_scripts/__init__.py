"""Small rebuilds of public scripts for DeepSpeed, with their imports changed.

``tests/torch_frontend/deepspeed/test_scripts.py`` runs each one with the face; and with the installed DeepSpeed, as it
was before. They write the losses, and the files that such scripts write, to a folder.
"""
