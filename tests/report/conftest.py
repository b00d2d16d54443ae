"""What these tests share: a folder of logs for each."""

from support.own_logs import own_logs as own_logs
