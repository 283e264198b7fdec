"""Other engines on the same model, prompts and cores: `dspark bench peers`."""
