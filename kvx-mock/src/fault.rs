//! Faults of engines and of the ways between them.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use kvx_core::{Error, Result};

use crate::backend::MockBackend;
use crate::engine::{Life, Wait};
use crate::error::BACKEND;
use crate::fabric::Fabric;
use crate::net::{EngineId, Net};
use crate::schedule::{Happening, Lane};
use crate::timing::{Nanos, nanos};
use crate::trace::What;
use crate::way::pair;

impl Fabric {
    /// Kills the process of the newest engine of this name. Its memory is gone, nothing that it posted moves on, and it hears
    /// of nothing any more: calls to its backend fail. Each of its peers finds out after the preset's
    /// [`death`](crate::Timing::death) time; until then what they post to it stays in flight.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Misuse`](kvx_core::ErrorKind::Misuse): no engine was opened under this name.
    pub fn kill(&self, name: &str) -> Result<()> {
        self.with(|net| {
            let engine = net.newest("kill", name)?.0;
            net.kill(engine);
            Ok(())
        })
    }

    /// Stops the process of the newest engine of this name, as `SIGSTOP` does: its polls give and move nothing. What it has
    /// posted goes on, and its memory is read and written, where that is the work of a network card; where it is the
    /// [work of the process](crate::Preset::is_software), both wait. Its peers are told nothing.
    ///
    /// # Errors
    ///
    /// As for [`kill`](Self::kill).
    pub fn stop(&self, name: &str) -> Result<()> {
        self.with(|net| {
            let engine = net.newest("stop", name)?.0;
            net.set_stopped(engine, true);
            Ok(())
        })
    }

    /// Lets a process go on that was [stopped](Self::stop).
    ///
    /// # Errors
    ///
    /// As for [`kill`](Self::kill).
    pub fn resume(&self, name: &str) -> Result<()> {
        self.with(|net| {
            let engine = net.newest("resume", name)?.0;
            net.set_stopped(engine, false);
            Ok(())
        })
    }

    /// Starts the process of the newest engine of this name again, [killing](Self::kill) it first if it lives. The new engine
    /// has the same name and preset and is in the same partitions, but another incarnation: handles and keys of the old one
    /// are worth nothing.
    ///
    /// # Errors
    ///
    /// As for [`kill`](Self::kill).
    pub fn restart(&self, name: &str) -> Result<Arc<MockBackend>> {
        let preset = self.with(|net| {
            let (engine, preset) = net.newest("restart", name)?;
            net.kill(engine);
            Ok::<_, Error>(preset)
        })?;
        Ok(self.backend(preset, name))
    }

    /// Lets nothing pass between the engines of two names, of this life or another, until the guard is dropped. What is under
    /// way between them waits. If it lasts longer than the preset's [`silence`](crate::Timing::silence), each side gives the
    /// other up: its transfers fail, and the peer is down.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Misuse`](kvx_core::ErrorKind::Misuse): no engine was opened under one of the names, or they are the same.
    pub fn partition(&self, one: &str, other: &str) -> Result<Partition> {
        let names = self.with(|net| {
            let names = net.two_names("partition", one, other)?;
            net.cut(&names.0, &names.1);
            Ok::<_, Error>(names)
        })?;
        Ok(Partition { fabric: self.clone(), names: Some(names) })
    }

    /// A link that flaps: from now on, `times` times, nothing passes between the engines of two names for `down`, then
    /// everything for `up`, of virtual time.
    ///
    /// # Errors
    ///
    /// As for [`partition`](Self::partition).
    pub fn flap(
        &self,
        one: &str,
        other: &str,
        down: Duration,
        up: Duration,
        times: u32,
    ) -> Result<()> {
        self.with(|net| {
            let names = net.two_names("flap", one, other)?;
            let number = net.number();
            let (down, up) = (nanos(down), nanos(up));
            net.flaps.insert(number, Flap { names, down, up, left: times, is_down: false });
            net.flap(number);
            Ok(())
        })
    }
}

/// Lets nothing pass between two engines, until it is dropped.
#[must_use = "a partition heals when its guard is dropped; `.forever()` keeps it"]
pub struct Partition {
    fabric: Fabric,
    names: Option<(Arc<str>, Arc<str>)>,
}

impl Partition {
    /// Opens the way again, as dropping the guard does.
    pub fn heal(self) {
        drop(self);
    }

    /// Keeps it as long as the fabric exists.
    pub fn forever(mut self) {
        self.names = None;
    }
}

impl Drop for Partition {
    fn drop(&mut self) {
        if let Some((one, other)) = self.names.take() {
            self.fabric.with(|net| net.heal(&one, &other));
        }
    }
}

impl fmt::Debug for Partition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Partition").field("names", &self.names).finish_non_exhaustive()
    }
}

/// A link that flaps.
pub(crate) struct Flap {
    names: (Arc<str>, Arc<str>),
    down: Nanos,
    up: Nanos,
    left: u32,
    is_down: bool,
}

impl Net {
    fn newest(
        &self,
        operation: &'static str,
        name: &str,
    ) -> Result<(EngineId, crate::preset::Preset)> {
        self.named.get(name).cloned().ok_or_else(|| {
            let known: Vec<&str> = self.named.keys().map(|name| &**name).collect();
            Error::misuse(operation, format!("no engine was opened under the name {name:?}"))
                .with_backend(BACKEND)
                .with_context("opened", known.join(", "))
        })
    }

    fn two_names(
        &self,
        operation: &'static str,
        one: &str,
        other: &str,
    ) -> Result<(Arc<str>, Arc<str>)> {
        self.newest(operation, one)?;
        self.newest(operation, other)?;
        if one == other {
            return Err(Error::misuse(operation, "an engine cannot be parted from itself")
                .with_backend(BACKEND)
                .with_context("name", one));
        }
        Ok((Arc::from(one), Arc::from(other)))
    }

    fn kill(&mut self, engine: EngineId) {
        if self.engines.get(&engine).is_none_or(|entry| entry.life != Life::Up) {
            return;
        }
        self.record(engine, What::Killed);
        let lanes = self.lanes_of(engine);
        for lane in lanes {
            self.die(lane);
        }
        self.withdraw(engine, Life::Killed);
        for other in self.lanes_to(engine) {
            self.watch(other);
        }
        if let Some(entry) = self.engines.get_mut(&engine) {
            entry.peers.drain();
            entry.keys.drain();
            entry.closing.clear();
            entry.in_flight.clear();
            entry.inbox = Default::default();
        }
    }

    /// What one side of a connection has under way is gone with its process; a notification may have got through.
    fn die(&mut self, lane: Lane) {
        let Some(side) = self.side_mut(lane) else { return };
        let transfers = std::mem::take(&mut side.transfers);
        let notes: Vec<(u64, Wait)> =
            side.notes.iter().map(|(order, note)| (*order, note.wait)).collect();
        let (connection, notice) = (side.connection, side.notice.take());
        let keys = [side.silence.take(), side.loss.take(), side.finish.take()];
        for key in keys.into_iter().flatten() {
            self.schedule.remove(key);
        }
        if let Some((wait, _)) = notice {
            self.unschedule(wait);
        }
        for transfer in transfers.into_values() {
            self.unschedule(transfer.wait);
            self.give_up(transfer.work.locals.into_iter().map(|(_, region)| region));
        }
        for (order, wait) in notes {
            if self.coin() && matches!(wait, Wait::Time(_) | Wait::Turn) {
                self.deliver(lane, order);
            } else {
                self.lose(lane, order);
            }
        }
        if let Some(connection) = self.connections.remove(&connection) {
            let [one, other] = connection.sides;
            self.pairs.remove(&(one.0, other.0));
        }
    }

    fn set_stopped(&mut self, engine: EngineId, stopped: bool) {
        let Some(entry) = self.engines.get_mut(&engine) else { return };
        if std::mem::replace(&mut entry.stopped, stopped) == stopped {
            return;
        }
        if stopped {
            self.record(engine, What::Stopped);
            self.park();
        } else {
            self.record(engine, What::Resumed);
            self.unpark();
        }
    }

    /// Starts counting the time after which a side gives a peer up, where that is dead or out of reach.
    pub(crate) fn watch(&mut self, lane: Lane) {
        let timing = self.timing(lane.engine);
        let Some(entry) = self.engines.get(&lane.engine) else { return };
        let Some(side) = entry.peers.get(lane.peer) else { return };
        if !self.is_open(lane) || side.silence.is_some() {
            return;
        }
        let dead = self.engines.get(&side.engine).is_none_or(|other| other.life == Life::Killed);
        let span = if self.is_cut(&entry.name, &side.name) {
            timing.silence
        } else if dead {
            timing.death
        } else {
            return;
        };
        let delay = self.draw(span);
        let key = self.schedule.after(delay, Happening::Silence(lane));
        if let Some(side) = self.side_mut(lane) {
            side.silence = Some(key);
        }
    }

    fn cut(&mut self, one: &Arc<str>, other: &Arc<str>) {
        let count = self.cuts.entry(pair(one, other)).or_default();
        *count += 1;
        if *count > 1 {
            return;
        }
        self.record_by_name(Arc::clone(one), What::Cut(Arc::clone(other)));
        self.park();
        for lane in self.lanes_between(one, other) {
            self.watch(lane);
        }
    }

    fn heal(&mut self, one: &Arc<str>, other: &Arc<str>) {
        let names = pair(one, other);
        let Some(count) = self.cuts.get_mut(&names) else { return };
        *count -= 1;
        if *count > 0 {
            return;
        }
        self.cuts.remove(&names);
        self.record_by_name(Arc::clone(one), What::Healed(Arc::clone(other)));
        for lane in self.lanes_between(one, other) {
            if let Some(key) = self.side_mut(lane).and_then(|side| side.silence.take()) {
                self.schedule.remove(key);
                self.watch(lane);
            }
        }
        self.unpark();
    }

    fn lanes_between(&self, one: &Arc<str>, other: &Arc<str>) -> Vec<Lane> {
        let names = pair(one, other);
        let mut lanes = self.lanes();
        lanes.retain(|lane| {
            self.engines.get(&lane.engine).is_some_and(|entry| {
                let side = entry.peers.get(lane.peer);
                side.is_some_and(|side| pair(&entry.name, &side.name) == names)
            })
        });
        lanes
    }

    /// A link that flaps changes its state.
    pub(crate) fn flap(&mut self, number: u64) {
        let Some(mut flap) = self.flaps.remove(&number) else { return };
        let (one, other) = (Arc::clone(&flap.names.0), Arc::clone(&flap.names.1));
        let delay = if flap.is_down {
            self.heal(&one, &other);
            flap.left -= 1;
            flap.up
        } else if flap.left > 0 {
            self.cut(&one, &other);
            flap.down
        } else {
            return;
        };
        flap.is_down = !flap.is_down;
        if flap.is_down || flap.left > 0 {
            self.schedule.after(delay, Happening::Flap(number));
            self.flaps.insert(number, flap);
        }
    }
}
