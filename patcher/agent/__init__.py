"""The program that runs on the host: it looks, and it changes files all or nothing.

Standard library only, CPython 3.9 or later. ``patcher.wire.call`` sends the modules that an
operation needs as one text over standard input, followed by one JSON request; the program
answers with one framed JSON reply. All three travel compressed. It decides nothing: it is
given complete new files and the sha256 that each old file must still have, and ends with all
of the old or all of the new. What it does in which order is ``steps.STEPS``; whatever kills
it, the journal tells the next run whether to undo or to finish. Imports between the modules
are relative: on the host the package has another name.
"""
