"""MuJoCo tasks on a pool of threads."""
