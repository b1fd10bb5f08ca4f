//! By which ways bytes were copied.

use std::ops::BitOr;

use crate::state::Place;
use crate::sys::runs::Run;

/// Which kinds of a side's memory bytes were copied from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Route(u32);

impl Route {
    const MAPPED: u32 = 1;
    const PROCESS_VM: u32 = 2;

    /// The ways from all places that the runs name.
    pub(crate) fn of(places: &[Place], runs: &[Run]) -> Self {
        let mut route = Self::default();
        for run in runs {
            route = route
                | match places.get(run.place() as usize) {
                    Some(Place::Shared(..)) => Self(Self::MAPPED),
                    Some(Place::Process(_)) => Self(Self::PROCESS_VM),
                    None => Self::default(),
                };
            if route.0 == Self::MAPPED | Self::PROCESS_VM {
                break;
            }
        }
        route
    }

    /// As a word, for a peer.
    pub(crate) const fn word(self) -> u32 {
        self.0
    }

    /// Of a peer's word. `None` of one that names other ways.
    pub(crate) fn from_word(word: u32) -> Option<Self> {
        (word <= Self::MAPPED | Self::PROCESS_VM).then_some(Self(word))
    }

    /// For people. `None` where nothing was copied.
    pub(crate) const fn name(self) -> Option<&'static str> {
        match self.0 {
            Self::MAPPED => Some("mapped"),
            Self::PROCESS_VM => Some("process_vm"),
            0 => None,
            _ => Some("mapped+process_vm"),
        }
    }
}

impl BitOr for Route {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_peers_are_checked_and_names_are_joined() {
        let names: Vec<_> =
            (0..4).map(|word| Route::from_word(word).unwrap().name()).collect();
        let all = [None, Some("mapped"), Some("process_vm"), Some("mapped+process_vm")];
        assert_eq!(names, all);
        assert_eq!(Route::from_word(4), None);
        assert_eq!(Route::from_word(u32::MAX), None);
    }

    #[test]
    fn only_places_that_are_copied_from_count() {
        let run = |place| Run::alone(place, 0, 8, 1);
        let places = [Place::Process(0), Place::Process(8)];
        assert_eq!(Route::of(&places, &[run(1)]), Route(Route::PROCESS_VM));
        assert_eq!(Route::of(&places, &[]), Route::default());
    }
}
