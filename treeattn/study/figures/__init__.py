"""Figures of what was measured: `cases` says which points belong together, each figure is a function from
them to charts, `draw` draws charts with matplotlib. The command is ``treeattn plot``."""
