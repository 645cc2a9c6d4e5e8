"""Text -> tokens -> packed rows of one fixed shape."""
