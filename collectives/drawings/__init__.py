"""Schedules for people and for other programs: text, SVG, HTML, GOAL."""
