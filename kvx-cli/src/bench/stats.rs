//! Medians, quantiles, and how sure they are.

use std::time::Duration;

use serde::Serialize;

/// What rounds came to: larger is better.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Spread {
    pub(crate) median: f64,
    pub(crate) best: f64,
    /// The median's 95% confidence interval, by order statistics: no distribution is assumed. None of fewer rounds than
    /// [`ENOUGH`].
    pub(crate) interval: Option<[f64; 2]>,
}

/// Fewest rounds that bound their median with 95% confidence: all of five do so with 1 - 2/2^5 = 93.8%, all of six with 96.9%.
pub(crate) const ENOUGH: usize = 6;

impl Spread {
    /// `None` of no values.
    pub(crate) fn of(mut values: Vec<f64>) -> Option<Self> {
        values.sort_by(f64::total_cmp);
        let interval = (values.len() >= ENOUGH).then(|| ranks(values.len()));
        Some(Self {
            median: middle(&values)?,
            best: *values.last()?,
            interval: interval.map(|ranks| ranks.map(|rank| values[rank])),
        })
    }
}

/// Two quantiles of waiting times, in microseconds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Quantiles {
    pub(crate) p50: f64,
    pub(crate) p99: f64,
}

impl Quantiles {
    /// `None` of no values.
    pub(crate) fn of(mut times: Vec<Duration>) -> Option<Self> {
        times.sort_unstable();
        Self::ranked(&times.into_iter().map(micros).collect::<Vec<_>>())
    }

    /// Of what each of one kind took longer than the one of another kind beside it. `None` of no pairs.
    pub(crate) fn of_differences(of: &[Duration], beside: &[Duration]) -> Option<Self> {
        let pairs = of.iter().zip(beside);
        let mut all: Vec<f64> = pairs.map(|(one, other)| micros(*one) - micros(*other)).collect();
        all.sort_by(f64::total_cmp);
        Self::ranked(&all)
    }

    fn ranked(sorted: &[f64]) -> Option<Self> {
        let at = |per_cent: usize| {
            let rank = (sorted.len() * per_cent).div_ceil(100).saturating_sub(1);
            sorted.get(rank).copied()
        };
        Some(Self { p50: at(50)?, p99: at(99)? })
    }
}

/// In microseconds.
pub(crate) fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

/// The middle of sorted values; of two, their mean.
fn middle(sorted: &[f64]) -> Option<f64> {
    let half = sorted.len() / 2;
    let upper = *sorted.get(half)?;
    Some(if sorted.len() % 2 == 1 { upper } else { f64::midpoint(sorted[half - 1], upper) })
}

/// The median of values in any order. `None` of none.
pub(crate) fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    middle(&values)
}

/// Which of `count` sorted values bound the median with 95% confidence: the number of values below the median is binomial
/// with p = 1/2, taken as normal, rounded outwards. There are at least [`ENOUGH`].
fn ranks(count: usize) -> [usize; 2] {
    #[expect(clippy::cast_precision_loss, reason = "rounds are few")]
    let count_f = count as f64;
    let low = (count_f / 2.0 - 1.96 * count_f.sqrt() / 2.0).floor();
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "between 0 and the number of rounds"
    )]
    let low = (low.max(1.0) - 1.0) as usize;
    [low, count - 1 - low]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_thirty_one_rounds_the_tenth_and_the_twenty_second_bound_the_median() {
        // 1 - 2 P(B <= 9) = 0.9706 for B binomial with n = 31 and p = 1/2, and 0.9292 for one rank further in.
        let spread = Spread::of((1..=31).rev().map(f64::from).collect()).unwrap();
        assert_eq!(spread, Spread { median: 16.0, best: 31.0, interval: Some([10.0, 22.0]) });
    }

    #[test]
    fn too_few_rounds_have_no_interval() {
        let spread = Spread::of(vec![4.0, 2.0]).unwrap();
        assert_eq!(spread, Spread { median: 3.0, best: 4.0, interval: None });
        let of = |count: u32| Spread::of((1..=count).map(f64::from).collect()).unwrap().interval;
        assert_eq!((of(1), of(5), of(6)), (None, None, Some([1.0, 6.0])));
        assert_eq!(Spread::of(Vec::new()), None);
        assert_eq!(median(vec![9.0, 1.0, 2.0]), Some(2.0));
    }

    #[test]
    fn quantiles_are_values_that_occurred() {
        let times: Vec<Duration> = (1..=200).rev().map(Duration::from_micros).collect();
        assert_eq!(Quantiles::of(times), Some(Quantiles { p50: 100.0, p99: 198.0 }));
        assert_eq!(Quantiles::of(Vec::new()), None);
        let one = Quantiles::of(vec![Duration::from_micros(7)]).unwrap();
        assert!((one.p50 - 7.0).abs() < 1e-9 && (one.p99 - 7.0).abs() < 1e-9);
    }

    /// A quantile of differences is no difference of quantiles: here each is 1 longer or 1 shorter than the one beside it, and both
    /// kinds have the same quantiles.
    #[test]
    fn differences_are_taken_pair_by_pair() {
        let times = |shift: u64| {
            let micros = (0..100).map(move |at| 10 + (at + shift) % 2);
            micros.map(Duration::from_micros).collect::<Vec<_>>()
        };
        let added = Quantiles::of_differences(&times(0), &times(1)).unwrap();
        assert!((added.p50 + 1.0).abs() < 1e-6 && (added.p99 - 1.0).abs() < 1e-6, "{added:?}");
        assert_eq!(Quantiles::of_differences(&[], &times(0)), None);
    }
}
