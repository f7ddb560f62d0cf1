"""The engine of pipelined methods: schedules, messages, and what backward passes run on."""
