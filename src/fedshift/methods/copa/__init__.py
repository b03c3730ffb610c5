"""COPA for unseen domains (`copa`) and for one unlabelled target (`copa_uda`), and what the two share (`parts`)."""
