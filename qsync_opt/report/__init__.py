"""Pictures and tables to keep: a page that shows a whole job, the Pareto curve, CSV."""

from qsync_opt.report.inputs import CurvePoint as CurvePoint
from qsync_opt.report.inputs import ReportInputs as ReportInputs
from qsync_opt.report.inputs import curve_of as curve_of
from qsync_opt.report.inputs import read_curve as read_curve
from qsync_opt.report.looks import check_image as check_image
from qsync_opt.report.measured import MeasuredRun as MeasuredRun
from qsync_opt.report.measured import MeasuredStep as MeasuredStep
from qsync_opt.report.measured import read_run as read_run
from qsync_opt.report.measured import read_trace as read_trace
from qsync_opt.report.pareto_chart import pareto_csv as pareto_csv
from qsync_opt.report.pareto_chart import plot_pareto as plot_pareto
from qsync_opt.report.writing import write_report as write_report
