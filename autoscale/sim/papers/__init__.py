"""The papers' own experiments on our decision core: each file states what one paper claims and what we find (pure)."""
