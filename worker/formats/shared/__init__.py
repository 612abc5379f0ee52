"""Has what all formats share: their type, the search for a model's format, and the splitter."""
