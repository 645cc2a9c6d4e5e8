"""hosts.yaml and recipes: the models, where the files are found, and how a recipe is resolved for a tag."""
