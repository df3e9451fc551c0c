"""Where other tools meet the library; each needs the tool that it is for, and nothing else imports it."""
