"""The main job on one machine: a small GPT trained by several processes, measured."""
