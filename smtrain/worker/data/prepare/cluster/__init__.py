"""Preparing on several machines: shares of the text are dealt to them, and the first puts the tokens in order."""
