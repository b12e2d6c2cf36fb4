"""The prepare stage: text to packed tokens, on one machine or several."""
