//! Requests that the connector sees for the first time, or never saw.

use kvx_core::{Error, Result};

use super::SchedulerConnector;
use super::request::{Request, RequestId};
use crate::protocol::Access;
use crate::ticket::{self, TransferParams};

impl SchedulerConnector {
    pub(super) fn knows(&self, request: &RequestId) -> bool {
        self.pulling.requests.contains_key(request)
    }

    /// Takes a request up, if it is seen for the first time.
    pub(super) fn track(&mut self, request: &Request<'_>) -> Result<Tracked> {
        let Some(params) = request.params else { return Ok(Tracked::Known) };
        if self.knows(request.id) {
            return Ok(Tracked::Known);
        }
        if self.publishing.holds(request.id) || self.pulling.drains(request.id) {
            return Err(Error::misuse("scheduler", "blocks of a request of this name are held")
                .with_context("request", request.id));
        }
        let asked = TransferParams::without_ticket(params)?;
        if asked.remote_decode && self.config.produces {
            self.publishing.track(&self.config, request, asked.transfer_id)?;
        }
        if asked.remote_prefill && self.config.consumes {
            let ticket = ticket::required(params)?;
            if ticket.access != Access::Read {
                return Err(Error::peer("scheduler", "the ticket is for writing, not for reading")
                    .with_context("lease", ticket.lease));
            }
            if !self.pulling.track(&self.config, request, ticket, &mut self.stats) {
                return Ok(Tracked::Full);
            }
        }
        Ok(Tracked::Known)
    }

    /// Whether a request's cache is for another engine.
    pub(super) fn wants_out(&self, request: &Request<'_>) -> bool {
        let asked = request.params.map(TransferParams::without_ticket);
        self.config.produces && matches!(asked, Some(Ok(asked)) if asked.remote_decode)
    }

    /// Gives back what a request's ticket promises that the connector has not been told of.
    pub(super) fn give_back_unseen(&mut self, request: &Request<'_>) {
        let Some(params) = request.params.filter(|_| self.config.consumes) else { return };
        let asked = TransferParams::without_ticket(params);
        if asked.is_ok_and(|asked| asked.remote_prefill)
            && let Ok(ticket) = ticket::required(params)
        {
            self.pulling.refuse(&ticket, &mut self.stats);
        }
    }
}

/// What became of a request that was shown.
pub(super) enum Tracked {
    /// It is known, if there is anything to know.
    Known,
    /// There are too many: it is not known.
    Full,
}
