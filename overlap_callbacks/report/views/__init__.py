"""The parts of a screen as plain data, one file for each subject: ``html`` and ``terminal`` draw them."""
