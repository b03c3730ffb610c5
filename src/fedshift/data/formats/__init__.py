"""The kinds of data that fedshift reads: image files with classes or masks, arrays, tables, public data sets."""
