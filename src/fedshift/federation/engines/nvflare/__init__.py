"""Sites on other machines, over NVIDIA FLARE. Only here is its package imported.

The run itself stays in the process of `fedshift train`, as with every engine. It submits a job that holds class names
and JSON; the job's `Bridge` at the server takes questions from the run over a local socket and hands them out as tasks,
the job's `SiteDoor` at each site passes them to a child process that works as workers on one machine do.

    train --- unix socket --- Bridge (server's job) === mutual TLS === SiteDoor (site's job) --- pipe --- worker
"""
