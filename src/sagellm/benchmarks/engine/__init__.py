"""`sagellm bench engine`: a whole engine on a fixed set of workloads, alone or beside other engines' rows."""
