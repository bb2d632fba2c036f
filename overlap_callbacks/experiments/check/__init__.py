"""``overlap check``: do the figures of a run keep to limits?"""
