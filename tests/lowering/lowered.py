"""Lower a checkpoint in memory to a package, without the pipeline around it."""



