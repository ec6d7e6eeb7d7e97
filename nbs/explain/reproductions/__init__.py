"""Published results measured again, and experiments without an agreed answer, with their stored numbers

`python -m reproductions` in `nbs/explain` lists them; the pages *Results reproduced* and *Open experiments*
show what is stored in the JSON files of this folder. Nothing of `stabilitylab` imports it.
"""
