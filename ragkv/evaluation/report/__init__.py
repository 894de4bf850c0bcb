"""Report: verdicts, tables and figures of what was measured, as one HTML file."""
