"""Pictures of a split: tables for people, plain data for machines."""
