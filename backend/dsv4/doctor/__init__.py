"""What is wrong with this machine or checkpoint, and what to do about it."""

from dsv4.doctor.examination import examine
from dsv4.doctor.findings import Finding, Severity, worst
from dsv4.doctor.machine import LocalMachine, Machine
from dsv4.doctor.options import DoctorOptions

__all__ = ["DoctorOptions", "Finding", "LocalMachine", "Machine", "Severity", "examine", "worst"]
