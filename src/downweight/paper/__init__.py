"""The paper's tables and figures, one file each; nothing in the library imports them."""
