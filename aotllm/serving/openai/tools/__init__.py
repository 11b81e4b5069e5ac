"""Tools of chat completions: their definitions, the forms that force a call, and the parsers that find one."""
