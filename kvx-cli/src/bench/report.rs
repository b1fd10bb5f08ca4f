//! What `kvx bench` says.

use std::collections::BTreeSet;
use std::path::Path;

use kvx_core::transfer::Mode;
use kvx_core::{Error, ErrorKind, Result};
use serde::Serialize;

use super::limits::LimitRound;
use super::rig::{Cpu, Rig, Round};
use super::small::{Notify, Sweep};
use super::stats::{ENOUGH, Quantiles, Spread, median, micros};
use crate::args::{BenchArgs, Order, RegionArg};
use crate::fabric::Fabric;
use crate::file;
use crate::output::{self, Output};
use crate::shape::Shape;
use crate::size;

/// What was measured, round by round.
#[derive(Debug, Default)]
pub(crate) struct Measured {
    pub(crate) rounds: Vec<Round>,
    pub(crate) limits: Vec<LimitRound>,
    /// GB/s of the other program.
    pub(crate) peer: Vec<f64>,
    pub(crate) cpu: Cpu,
    pub(crate) one_block: Option<Quantiles>,
    pub(crate) notify: Notify,
}

/// What `kvx bench --json` prints. Rates are in 10^9 bytes per second.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Report {
    pub(crate) backend: &'static str,
    pub(crate) transport: String,
    /// By which of the backend's ways the bytes went, where it has several and says so.
    pub(crate) route: Option<String>,
    /// From the first segment posted until all had settled.
    pub(crate) gbps: Option<Spread>,
    /// The backend's rate over the limit's of the same round: medians.
    pub(crate) ratio: Ratios<f64>,
    /// With intervals.
    pub(crate) ratios: Ratios<Spread>,
    /// The limits themselves, and the other program.
    pub(crate) others: Ratios<Spread>,
    /// Processor time of both processes.
    pub(crate) cpu_us_per_request: PerSide,
    /// As if no two blocks were neighbours, and as it was.
    pub(crate) segments: Segments,
    /// Medians of a request.
    pub(crate) request_us: RequestTimes,
    /// One block of one tensor.
    pub(crate) one_block_us: Option<Quantiles>,
    /// A notification there and back: both sides asleep.
    pub(crate) notify_rtt_us: Option<Quantiles>,
    /// The same while every core copies.
    pub(crate) notify_rtt_busy_us: Option<Quantiles>,
    /// The same while both sides poll without pause.
    pub(crate) notify_rtt_spin_us: Option<Quantiles>,
    /// The least there is: two counters (`eventfd`) between the same two processes, both asleep.
    pub(crate) raw_rtt_us: Option<Quantiles>,
    /// The same while every core copies.
    pub(crate) raw_rtt_busy_us: Option<Quantiles>,
    /// A notification while every core copies, with the threads that wait, of both sides, on one of them.
    pub(crate) notify_rtt_busy_together_us: Option<Quantiles>,
    /// The same with nothing but two counters.
    pub(crate) raw_rtt_busy_together_us: Option<Quantiles>,
    /// Every element was compared.
    pub(crate) verified: bool,
    pub(crate) bytes: u64,
    pub(crate) rounds: u32,
    /// Fewest rounds of which there are intervals.
    pub(crate) rounds_for_interval: usize,
    pub(crate) model: String,
    pub(crate) tokens: u64,
    pub(crate) blocks: &'static str,
    pub(crate) region: &'static str,
    pub(crate) mode: Mode,
    pub(crate) producer: Shape,
    pub(crate) consumer: Shape,
    /// Rates over sizes, where they were drawn.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) sweep: Option<Sweep>,
}

/// One for each who is compared; `None` of those that are not there.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Ratios<T> {
    /// Plain copies of the same blocks between two shared mappings.
    pub(crate) memcpy: Option<T>,
    /// `process_vm_readv` with the same segments, by the process that the bytes are for: of writes that is the other one.
    pub(crate) process_vm: Option<T>,
    /// Of writes: `process_vm_writev` with the same segments.
    pub(crate) process_vm_writev: Option<T>,
    /// The program of `--peer-command`.
    pub(crate) peer: Option<T>,
}

/// One figure per side.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct PerSide {
    pub(crate) initiator: f64,
    pub(crate) target: f64,
}

/// How many segments.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Segments {
    pub(crate) before: u64,
    pub(crate) merged: u64,
}

/// Where a request's time goes.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct RequestTimes {
    pub(crate) posted: f64,
    pub(crate) settled: f64,
}

impl Report {
    pub(crate) fn new(
        args: &BenchArgs,
        rig: &Rig<'_>,
        fabric: &Fabric,
        measured: Measured,
        sweep: Option<Sweep>,
        wrong: u64,
    ) -> Result<Self> {
        #[expect(clippy::cast_precision_loss, reason = "a rate for people")]
        let bytes = rig.bytes() as f64;
        let gbps = |seconds: f64| bytes / seconds / 1e9;
        let own: Vec<f64> =
            measured.rounds.iter().map(|round| gbps(round.settled.as_secs_f64())).collect();
        // By round: what failed in one leaves its place empty.
        let limit = |of: fn(&LimitRound) -> Option<f64>| {
            measured.limits.iter().map(|round| of(round).map(gbps)).collect::<Vec<_>>()
        };
        let rates = Ratios {
            memcpy: Some(limit(|round| round.memcpy)),
            process_vm: Some(limit(|round| round.process_vm)),
            process_vm_writev: Some(limit(|round| round.process_vm_writev)),
            peer: Some(measured.peer.into_iter().map(Some).collect()),
        };
        let others = rates.map(|rates| Spread::of(rates.iter().copied().flatten().collect()));
        let ratios = rates.map(|rates| Spread::of(ratios(&own, rates)));
        let medians = |time: fn(&Round) -> std::time::Duration| {
            median(measured.rounds.iter().map(|round| micros(time(round))).collect())
                .unwrap_or_default()
        };
        Ok(Self {
            backend: fabric.name(),
            transport: rig.transport()?,
            route: routes(&measured.rounds),
            ratio: ratios.map(|spread| Some(spread.median)),
            gbps: Spread::of(own),
            ratios,
            others,
            cpu_us_per_request: PerSide {
                initiator: measured.cpu.initiator,
                target: measured.cpu.target,
            },
            segments: Segments { before: rig.unmerged, merged: rig.merged() },
            request_us: RequestTimes {
                posted: medians(|round| round.posted),
                settled: medians(|round| round.settled),
            },
            one_block_us: measured.one_block,
            notify_rtt_us: measured.notify.idle,
            notify_rtt_busy_us: measured.notify.busy,
            notify_rtt_spin_us: measured.notify.spin,
            raw_rtt_us: measured.notify.raw_idle,
            raw_rtt_busy_us: measured.notify.raw_busy,
            notify_rtt_busy_together_us: measured.notify.busy_together,
            raw_rtt_busy_together_us: measured.notify.raw_busy_together,
            verified: wrong == 0,
            bytes: rig.bytes(),
            rounds: args.rounds,
            rounds_for_interval: ENOUGH,
            model: rig.engines.model.name().to_owned(),
            tokens: args.tokens,
            blocks: match args.blocks {
                Order::Contiguous => "contiguous",
                Order::Permuted => "permuted",
            },
            region: match args.region {
                RegionArg::Shared => "shared",
                RegionArg::Borrowed => "borrowed",
            },
            mode: rig.engines.mode,
            producer: rig.engines.producer,
            consumer: rig.engines.consumer,
            sweep,
        })
    }

    /// Prints it for people.
    pub(crate) fn print(&self, out: &mut Output) -> std::io::Result<()> {
        if out.is_json() {
            return Ok(());
        }
        out.line("")?;
        let mut table = output::table(&["", "GB/s", "best", "95% interval", "kvx is"], 1);
        let rows = [
            (self.backend, self.gbps.as_ref(), None),
            ("memcpy", self.others.memcpy.as_ref(), self.ratios.memcpy.as_ref()),
            ("process_vm_readv", self.others.process_vm.as_ref(), self.ratios.process_vm.as_ref()),
            (
                "process_vm_writev",
                self.others.process_vm_writev.as_ref(),
                self.ratios.process_vm_writev.as_ref(),
            ),
            ("peer", self.others.peer.as_ref(), self.ratios.peer.as_ref()),
        ];
        for (name, rate, ratio) in rows {
            let Some(Spread { median, best, interval }) = rate else { continue };
            table.add_row([
                name.to_owned(),
                format!("{median:.2}"),
                format!("{best:.2}"),
                range(*interval),
                ratio.map_or_else(String::new, |ratio| match ratio.interval {
                    Some(_) => format!("{:.2}× ({})", ratio.median, range(ratio.interval)),
                    None => format!("{:.2}×", ratio.median),
                }),
            ]);
        }
        out.table(&table)?;
        if self.rounds < u32::try_from(ENOUGH).unwrap_or(u32::MAX) {
            out.line(format!("an interval needs --rounds {ENOUGH} or more"))?;
        }
        out.line("")?;
        let PerSide { initiator, target } = self.cpu_us_per_request;
        out.line(format!(
            "{} of {} in {} ({} where blocks are no neighbours){}",
            size::of_many(self.rounds.into(), "round"),
            size::bytes(self.bytes),
            size::of_many(self.segments.merged, "segment"),
            size::count(self.segments.before),
            self.route.as_ref().map_or_else(String::new, |route| format!(", by {route}"))
        ))?;
        out.line(format!(
            "a request: posted in {:.0} µs, settled in {:.0} µs; {initiator:.0} µs of processor time here, \
             {target:.0} µs there",
            self.request_us.posted, self.request_us.settled
        ))?;
        for (what, times) in [
            ("one block", &self.one_block_us),
            ("notification there and back, both asleep", &self.notify_rtt_us),
            ("raw eventfd ping-pong, both asleep", &self.raw_rtt_us),
            ("notification while every core copies", &self.notify_rtt_busy_us),
            ("raw eventfd ping-pong while every core copies", &self.raw_rtt_busy_us),
            (
                "notification while every core copies, waited for on one of them",
                &self.notify_rtt_busy_together_us,
            ),
            ("raw eventfd ping-pong, the same", &self.raw_rtt_busy_together_us),
            ("notification, both polling", &self.notify_rtt_spin_us),
        ] {
            if let Some(Quantiles { p50, p99 }) = times {
                out.line(format!("{what}: {p50:.1} µs (p99 {p99:.1} µs)"))?;
            }
        }
        out.line(if self.verified { "verified" } else { "FAILED: elements are wrong" })
    }
}

/// An interval, for people.
fn range(interval: Option<[f64; 2]>) -> String {
    interval.map_or_else(|| "–".to_owned(), |[low, high]| format!("{low:.2}–{high:.2}"))
}

/// This one's rate over the other's, of each round in which both have one.
fn ratios(own: &[f64], other: &[Option<f64>]) -> Vec<f64> {
    own.iter().zip(other).filter_map(|(own, other)| Some(own / (*other)?)).collect()
}

/// The ways of all rounds, each once.
fn routes(rounds: &[Round]) -> Option<String> {
    let routes = rounds.iter().flat_map(|round| &round.routes).flat_map(|route| route.split('+'));
    let routes: BTreeSet<&str> = routes.collect();
    (!routes.is_empty()).then(|| routes.into_iter().collect::<Vec<_>>().join("+"))
}

impl<T> Ratios<T> {
    fn map<U>(&self, with: impl Fn(&T) -> Option<U>) -> Ratios<U> {
        Ratios {
            memcpy: self.memcpy.as_ref().and_then(&with),
            process_vm: self.process_vm.as_ref().and_then(&with),
            process_vm_writev: self.process_vm_writev.as_ref().and_then(&with),
            peer: self.peer.as_ref().and_then(&with),
        }
    }
}

/// Says at once where no picture can be put: nobody wants to hear that after all was measured.
pub(crate) fn refuse_place(path: &Path) -> Result<()> {
    output::refuse_dash("--svg", path)?;
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let (why, remedy) = match folder {
        _ if path.is_dir() => ("it is a folder", "name a file in it"),
        Some(folder) if !folder.is_dir() => ("its folder is not there", "make the folder"),
        _ => return Ok(()),
    };
    Err(cannot_be_written(path).with_context("why", why).with_remedy(remedy))
}

fn cannot_be_written(path: &Path) -> Error {
    Error::new(ErrorKind::Misuse, "--svg", format!("{} cannot be written", path.display()))
}

/// Draws a sweep.
pub(crate) fn draw(path: &Path, sweep: &Sweep) -> Result<()> {
    use plotters::prelude::*;

    const CURVES: [(&str, RGBColor); 2] = [("segment", BLUE), ("request", RED)];

    let failed = |error: &dyn std::fmt::Display| cannot_be_written(path).with_context("why", error);
    let points = || sweep.segments.iter().chain(&sweep.requests);
    let (Some(least), Some(most)) =
        (points().map(|(bytes, _)| *bytes).min(), points().map(|(bytes, _)| *bytes).max())
    else {
        return Err(Error::config("--svg", "nothing was moved that could be drawn")
            .with_remedy("give more tokens"));
    };
    let top = points().map(|(_, rate)| *rate).fold(0.0, f64::max) * 1.1;
    let mut text = String::new();
    let root = SVGBackend::with_string(&mut text, (900, 480)).into_drawing_area();
    root.fill(&WHITE).map_err(|error| failed(&error))?;
    let mut chart = ChartBuilder::on(&root)
        .caption("GB/s by size", ("sans-serif", 20))
        .margin(16)
        .x_label_area_size(40)
        .y_label_area_size(50)
        .build_cartesian_2d((least..most).log_scale().base(2.0), 0.0..top)
        .map_err(|error| failed(&error))?;
    chart
        .configure_mesh()
        .x_desc("bytes")
        .y_desc("GB/s")
        .x_label_formatter(&|bytes| size::bytes(*bytes))
        .draw()
        .map_err(|error| failed(&error))?;
    for ((name, colour), curve) in CURVES.into_iter().zip([&sweep.segments, &sweep.requests]) {
        chart
            .draw_series(
                LineSeries::new(curve.iter().copied(), colour.stroke_width(2)).point_size(3),
            )
            .map_err(|error| failed(&error))?
            .label(format!("size of a {name}"))
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 20, y)], colour));
    }
    chart
        .configure_series_labels()
        .background_style(WHITE)
        .border_style(BLACK)
        .position(SeriesLabelPosition::LowerRight)
        .draw()
        .map_err(|error| failed(&error))?;
    root.present().map_err(|error| failed(&error))?;
    drop((chart, root));
    file::replace(path, &text).map_err(|error| failed(&error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_compared_with_those_of_the_same_round() {
        let own = [1.0, 2.0, 4.0, 8.0];
        assert_eq!(ratios(&own, &[Some(1.0), None, Some(4.0), Some(2.0)]), [1.0, 1.0, 4.0]);
        assert!(ratios(&own, &[None; 4]).is_empty());
        assert!(ratios(&own, &[]).is_empty());
    }
}
