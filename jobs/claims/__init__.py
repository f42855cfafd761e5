"""The article's claims (algorithm.md 7), each as small experiments with a control and a rule fixed beforehand."""
