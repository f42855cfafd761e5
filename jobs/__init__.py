"""The programs that a user starts, and the only place where pipeline and r2d2 meet: parse, build, wire, run, close."""
